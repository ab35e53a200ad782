"""slime's launch scripts read and moved over: bash is parsed (``parse.py``), followed without running anything
(``follow.py``), and what it starts becomes a command of ours (``move.py``). Called by ``slime train --from-script``."""
