"""Options of every command: one strict parse of slime's own and the engines' native flags, before torch is imported.

:func:`slime_cli.options.resolve.resolve` is the way in. Nothing here imports an engine.
"""
