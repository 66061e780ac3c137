"""How a response is decoded: the types that front end, scheduler and workers share."""
