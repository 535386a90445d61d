"""Places one rank among those of its world, and takes it over to the next one."""
