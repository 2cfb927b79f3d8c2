"""Settings of updates: advantage estimators and policy losses with what each reads, and users' own."""
