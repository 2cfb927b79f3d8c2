"""Synchronisation of weights from learners to engines.

The trainer publishes a version (`trainer.components.publication`). An actor (`coordinator`) has every replica
reach it (`executor`), while rank 0 of the learners (`publisher`) drives the phases of the transfer over one
of the `transports`.
"""
