/** Raised when the other side has broken the protocol; `code` is one of "Codes of `refused`". */
export class Breach extends Error {
  constructor(code, text) {
    super(text);
    this.name = "Breach";
    this.code = code;
  }
}
