"""Makes what screens show of a whole job: its status, the status page, the screen of `top`."""
