"""Environments on other hosts: a gateway that takes hosts in, and the program that a host runs."""
