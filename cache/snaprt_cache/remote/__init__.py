"""A second, slower place for blobs, such as a bucket."""
