"""Page, API, `/metrics` and report: results as HTML, JSON and text."""
