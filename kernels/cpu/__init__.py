"""Parts of operators' CPU paths that fill a file of their own."""
