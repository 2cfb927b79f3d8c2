"""A ferry line's help desk: a JSON database of customers, crossings and bookings, a page of policy, six tools
and 26 tasks."""
