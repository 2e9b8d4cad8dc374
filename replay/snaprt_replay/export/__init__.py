"""Write a case in formats that other tools read."""
