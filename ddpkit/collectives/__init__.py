"""Move values between ranks, and wait for them."""
