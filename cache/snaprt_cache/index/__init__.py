"""The SQLite index of a cache: rebuilt from the blobs when it is bad."""
