"""`bench`: put load on any endpoint that speaks one of the dialects, and report latencies."""
