"""Recordings of what an engine did, and a page that shows them."""
