"""What lies behind `labkit.models`: the catalogue, fetching, verifying and converting. Use `labkit.models`."""
