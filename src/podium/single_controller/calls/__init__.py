"""One call of a group from its arguments to its result: bind, dispatch, send, wait, collect; and the futures of results."""
