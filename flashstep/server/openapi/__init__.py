"""The description of this API in OpenAPI 3.1, made from the routes and the structs that the handlers themselves use."""
