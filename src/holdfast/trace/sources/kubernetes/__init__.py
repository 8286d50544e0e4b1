"""Read jobs and pods as `kubectl get -o json` prints them, with Kueue's workloads."""
