"""Request options, and their way into a ``DecodingSpec``."""
