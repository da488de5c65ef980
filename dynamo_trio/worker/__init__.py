"""The worker role: an engine served as Dynamo's ``generate`` endpoint."""
