//! Splits code into words and signs, and finds where an item of a module ends.

use proc_macro2::{Delimiter, Spacing, Span, TokenStream, TokenTree};

#[derive(Clone)]
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
        self.text
            .starts_with(|c: char| c.is_alphanumeric() || c == '_')
    }
}

/// Splits the code of a Rust file. Comments, literals and lifetimes are no tokens, and `::` is one.
///
/// What is compiled for tests only is left out, and so are attributes with `cfg_attr`: those may name a crate that an
/// optional feature brings.
pub(crate) fn tokens(text: &str) -> Vec<Token> {
    let stream: TokenStream = text
        .parse()
        .unwrap_or_else(|error| panic!("{error}: {text}"));
    let mut all = Vec::new();
    push_tokens(stream, &mut all);
    let begins = |at: usize, words: &[&str]| {
        let pairs = all[at..].iter().zip(words);
        pairs.filter(|(token, word)| token.is(word)).count() == words.len()
    };
    let mut kept = Vec::new();
    let mut at = 0;
    while at < all.len() {
        if begins(at, &["#", "[", "cfg_attr"]) {
            at = end_of_attribute(&all, at);
        } else if begins(at, &["#", "[", "cfg", "(", "test", ")", "]"]) {
            at = end_of_item(&all, end_of_attribute(&all, at));
        } else {
            kept.push(all[at].clone());
            at += 1;
        }
    }
    kept
}

fn push_tokens(stream: TokenStream, tokens: &mut Vec<Token>) {
    let mut trees = stream.into_iter().peekable();
    while let Some(tree) = trees.next() {
        let mut push = |text: &str, span: Span| {
            let (text, line) = (text.to_owned(), span.start().line);
            tokens.push(Token { text, line });
        };
        match tree {
            TokenTree::Group(group) => {
                let (open, close) = match group.delimiter() {
                    Delimiter::Parenthesis => ("(", ")"),
                    Delimiter::Brace => ("{", "}"),
                    Delimiter::Bracket => ("[", "]"),
                    Delimiter::None => ("", ""),
                };
                push(open, group.span_open());
                push_tokens(group.stream(), tokens);
                let line = group.span_close().start().line;
                let text = close.to_owned();
                tokens.push(Token { text, line });
            }
            TokenTree::Ident(word) => push(&word.to_string(), word.span()),
            TokenTree::Punct(sign) => {
                let next = trees.peek().map(ToString::to_string);
                match sign.as_char() {
                    '\'' => drop(trees.next()),
                    ':' if sign.spacing() == Spacing::Joint && next.as_deref() == Some(":") => {
                        trees.next();
                        push("::", sign.span());
                    }
                    other => push(&other.to_string(), sign.span()),
                }
            }
            TokenTree::Literal(_) => {}
        }
    }
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
fn end_of_attribute(tokens: &[Token], start: usize) -> usize {
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
