"""The components of a run: its store, its runners, the models that it serves, and its learners.

Each is one class. `open` starts what other components need, and registers what stops it. `start` waits until
the component is up. `watches` returns coroutines that fail when the component has failed for good. None
knows the insides of another.
"""
