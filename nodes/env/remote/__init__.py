"""Environments on other hosts: the gateway that takes hosts in, and the program that a host runs."""
