"""What the host libraries' objects look like: one file per library; none imports its library."""
