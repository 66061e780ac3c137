"""What requests may ask for, and how that becomes a ``DecodingSpec``."""
