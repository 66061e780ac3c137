"""Parts of the cache methods' layer passes."""
