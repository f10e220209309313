"""What two of something do against one: ranks, processes over a graph, replicas; and what that says of many sockets."""
