"""Read the jobs, pods and Kueue workloads that `kubectl get -o json` prints."""
