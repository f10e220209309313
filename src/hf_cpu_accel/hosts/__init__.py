"""The structure of the host libraries' objects: one file per library; none imports its library."""
