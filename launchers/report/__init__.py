"""What a run's records say after, or while, it runs: time by cause, restarts, curves, and the page that shows them.

Called by `ortflow report`, `goodput`, `top` and `list`. Reads run directories only, and writes nothing into them.
"""
