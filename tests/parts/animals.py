"""Parts of a table that only tests have."""

from __future__ import annotations

from abc import ABC, abstractmethod


class Animal(ABC):
    @abstractmethod
    def speak(self) -> str: ...


class Dog(Animal):
    def speak(self) -> str:
        return "woof"
