"""The engine as we found it: chapter 00 reads it, the audit judges it, nothing else imports it."""
