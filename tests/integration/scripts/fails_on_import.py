"""A script with a mistake in its first line."""

import there_is_no_such_module  # type: ignore[import-not-found]

print(there_is_no_such_module)
