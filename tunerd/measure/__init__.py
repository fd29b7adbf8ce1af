"""Numbers that may be believed: requests, answers, suites, pairs, evidence."""
