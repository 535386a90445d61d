"""Implements a worker's life: it joins a generation, trains, stops, and joins the next."""
