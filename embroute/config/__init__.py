"""What users describe: clusters, and values such as `name(argument, key=value)`."""
