"""What the host libraries' objects look like: one file per library, imported only if the library is."""
