"""Training one of the built-in models on a data set, as any rank of a job."""
