"""What people want: profiles, their layers, workloads, and what a sweep found for them."""
