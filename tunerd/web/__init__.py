"""The page, the API and its two processes, `/metrics`, the report: views of results as HTML, JSON and text."""
