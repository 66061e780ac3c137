"""Code editors as clients: the forms in which they ask for a completion at the cursor."""
