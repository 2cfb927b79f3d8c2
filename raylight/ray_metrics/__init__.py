"""Metrics of a run in Ray's metrics, from where Prometheus reads them, and Grafana's board of them."""
