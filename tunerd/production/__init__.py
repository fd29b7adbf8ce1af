"""The one server that serves: plan, swap, gate, lease, and the way back."""
