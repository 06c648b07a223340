"""What tests share: real servers, real hosts."""
