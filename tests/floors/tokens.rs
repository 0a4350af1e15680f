//! Splits code into words and signs, and finds where an item of a module ends.

use crate::text::is_word;

pub(crate) struct Token {
    pub(crate) text: String,
    /// From 1.
    pub(crate) line: usize,
}

impl Token {
    pub(crate) fn is(&self, text: &str) -> bool {
        self.text == text
    }

    pub(crate) fn is_word(&self) -> bool {
        self.text.starts_with(is_word)
    }
}

/// Splits code without comments and literals. `::` is one token, a lifetime is none.
pub(crate) fn tokens(code: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    let mut line = 1;
    let mut rest = code;
    while let Some(c) = rest.chars().next() {
        let word = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
        let length = match c {
            '\'' => {
                let name = rest[1..].find(|c| !is_word(c));
                1 + name.unwrap_or(rest.len() - 1)
            }
            _ if word > 0 => word,
            _ if rest.starts_with("::") => 2,
            _ => c.len_utf8(),
        };
        if c == '\n' {
            line += 1;
        } else if !c.is_whitespace() && c != '\'' {
            let text = rest[..length].to_owned();
            tokens.push(Token { text, line });
        }
        rest = &rest[length..];
    }
    tokens
}

/// The index behind the item that begins at `start`: behind its `;`, or behind the bracket that closes its body.
pub(crate) fn end_of_item(tokens: &[Token], start: usize) -> usize {
    // The body of these is an expression or a path in front of a `;`.
    let ends_with_semicolon = ["const", "static", "type", "use"]
        .iter()
        .any(|word| tokens[start].is(word));
    let mut depth = 0_usize;
    for (at, token) in tokens.iter().enumerate().skip(start) {
        match token.text.as_str() {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" => depth = depth.saturating_sub(1),
            "}" => {
                depth = depth.saturating_sub(1);
                if depth == 0 && !ends_with_semicolon {
                    return at + 1;
                }
            }
            ";" if depth == 0 => return at + 1,
            _ => {}
        }
    }
    tokens.len()
}

/// The index behind the attribute whose `#` stands at `start`.
pub(crate) fn end_of_attribute(tokens: &[Token], start: usize) -> usize {
    let mut depth = 0_usize;
    for (at, token) in tokens.iter().enumerate().skip(start) {
        match token.text.as_str() {
            "[" => depth += 1,
            "]" => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return at + 1;
                }
            }
            _ => {}
        }
    }
    tokens.len()
}

/// The index behind the `>` that closes the `<` at `start`; an arrow closes none.
pub(crate) fn end_of_generics(tokens: &[Token], start: usize) -> usize {
    let mut depth = 0_usize;
    for (at, token) in tokens.iter().enumerate().skip(start) {
        if token.is("<") {
            depth += 1;
        } else if token.is(">") && !tokens[at - 1].is("-") {
            depth = depth.saturating_sub(1);
            if depth == 0 {
                return at + 1;
            }
        }
    }
    tokens.len()
}
