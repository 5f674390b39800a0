// A file that is named.
