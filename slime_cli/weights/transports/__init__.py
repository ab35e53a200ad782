"""Ways by which weights reach engines, one a module; each is a :class:`slime_cli.weights.transport.Transport`."""
