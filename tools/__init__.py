"""Tools of authors, instructors and of those with a GPU machine; lessons do not need them."""


class ToolError(Exception):
    """Something that a tool cannot do; the message says why, and what to do."""
