"""Requests, one file for each kind. The table in wire/requests.py names the file and the method that answer each."""
