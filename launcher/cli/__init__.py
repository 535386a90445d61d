"""The command line: `elasticzero run | local | status | drain | scale | stop | checkpoint …`."""
