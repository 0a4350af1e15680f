//! Counts the files and types on the path that callgrind observed, for `benches/request_path.sh`.

#[allow(dead_code, reason = "the tests of the architecture use all of it")]
#[path = "../../tests/floors/modules.rs"]
mod modules;
#[allow(dead_code, reason = "the tests of the architecture use all of it")]
#[path = "../../tests/floors/text.rs"]
mod text;
mod tokens;

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::modules::{Crate, Target};
use crate::text::{read, read_files};
use crate::tokens::Token;

fn main() -> io::Result<()> {
    let args: Vec<String> = env::args().skip(1).collect();
    let [src, profile, rest @ ..] = args.as_slice() else {
        // `cargo bench` only starts it.
        return Ok(());
    };
    let files = read_files(Path::new(src), "rs");
    let krate = Crate::new(&files);
    let executed = executed_lines(&read(Path::new(profile)), src);
    let mut types = BTreeSet::new();
    let mut functions = 0;
    for (path, lines) in &executed {
        let Some(file) = files.iter().position(|file| file.path == *path) else {
            continue;
        };
        let tokens = tokens::tokens(&files[file].text);
        for function in executed_functions(&tokens, lines) {
            functions += 1;
            types.extend(mentioned_types(&krate, file, &function));
        }
    }
    let mut out = io::stdout().lock();
    if rest.iter().any(|arg| arg == "--list") {
        writeln!(out, "files:")?;
        for (path, lines) in &executed {
            writeln!(out, "  {} ({} lines executed)", path.display(), lines.len())?;
        }
        writeln!(out, "types:")?;
        for (file, name) in &types {
            writeln!(out, "  {name} ({})", krate.files[*file].display())?;
        }
    }
    let (all_types, all_files) = (declared_types(&krate), source_files(&krate));
    writeln!(
        out,
        "{} of {all_types} named types in {} of {all_files} files, {functions} functions",
        types.len(),
        executed.len(),
    )
}

/// The lines below `src` that have a cost in callgrind's profile, by file.
fn executed_lines(profile: &str, src: &str) -> BTreeMap<PathBuf, BTreeSet<usize>> {
    let mut executed: BTreeMap<PathBuf, BTreeSet<usize>> = BTreeMap::new();
    let mut file: Option<PathBuf> = None;
    let mut is_call = false;
    for line in profile.lines() {
        let path = ["fl=", "fi=", "fe="]
            .iter()
            .find_map(|key| line.strip_prefix(key));
        if let Some(path) = path {
            file = Path::new(path).strip_prefix(src).map(Path::to_owned).ok();
        } else if line.starts_with("calls=") {
            // The next line has the cost of the callee.
            is_call = true;
        } else if line.starts_with(|c: char| c.is_ascii_digit()) {
            if let (false, Some(file), Some(number)) = (is_call, &file, first_number(line)) {
                executed.entry(file.clone()).or_default().insert(number);
            }
            is_call = false;
        }
    }
    executed
}

/// The line of a cost. The compiler gives 0 to code without one.
fn first_number(line: &str) -> Option<usize> {
    let number = line.split(' ').next()?.parse().ok()?;
    (number > 0).then_some(number)
}

/// The tokens of each function that has an executed line and is the innermost one around it: those of its signature
/// and of its executed lines, with those of the head of its `impl`.
fn executed_functions<'a>(tokens: &'a [Token], lines: &BTreeSet<usize>) -> Vec<Vec<&'a Token>> {
    let functions = blocks(tokens, "fn");
    let impls = blocks(tokens, "impl");
    let around = |blocks: &[Block], line: usize| {
        let around = blocks.iter().filter(|block| block.has(tokens, line));
        around.max_by_key(|block| block.start).copied()
    };
    let executed: BTreeSet<Block> = lines
        .iter()
        .filter_map(|line| around(&functions, *line))
        .collect();
    executed
        .iter()
        .map(|function| {
            let head = around(&impls, tokens[function.start].line);
            let head = head.map_or(&tokens[0..0], |head| &tokens[head.start..head.body]);
            let own = &tokens[function.start..function.end];
            // A function inside this one counts if it is executed itself.
            let is_inner = |at: usize| {
                let inner =
                    |block: &&Block| block.start > function.start && block.end <= function.end;
                functions
                    .iter()
                    .filter(inner)
                    .any(|block| block.start <= at && at < block.end)
            };
            // A branch that is not taken is not on the path.
            let is_on_path =
                |at: usize, token: &Token| at < function.body || lines.contains(&token.line);
            let own = own.iter().enumerate();
            let own = own.filter(|(at, token)| {
                let at = function.start + at;
                !is_inner(at) && is_on_path(at, token)
            });
            head.iter().chain(own.map(|(_, token)| token)).collect()
        })
        .collect()
}

/// Where a function or an `impl` begins, where its body does, and where it ends.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Block {
    start: usize,
    body: usize,
    end: usize,
}

impl Block {
    fn has(&self, tokens: &[Token], line: usize) -> bool {
        tokens[self.start].line <= line && line <= tokens[self.end - 1].line
    }
}

/// The blocks that begin with a word, without declarations that have no body.
fn blocks(tokens: &[Token], word: &str) -> Vec<Block> {
    let mut blocks = Vec::new();
    for start in 0..tokens.len() {
        let opens_item = start == 0
            || ["}", "{", ";", "]", ")"]
                .iter()
                .any(|sign| tokens[start - 1].is(sign))
            || ["pub", "unsafe", "async", "const"]
                .iter()
                .any(|word| tokens[start - 1].is(word));
        // A type may be `fn(u8)` or `impl Trait`.
        let is_item = if word == "fn" {
            tokens.get(start + 1).is_some_and(Token::is_word)
        } else {
            opens_item
        };
        if !tokens[start].is(word) || !is_item {
            continue;
        }
        let end = tokens::end_of_item(tokens, start);
        let body = tokens[start..end].iter().position(|token| token.is("{"));
        if let Some(body) = body
            && tokens[end - 1].is("}")
        {
            let body = start + body;
            blocks.push(Block { start, body, end });
        }
    }
    blocks
}

/// The types of the crate that some tokens of a file name, each with the file that declares it.
fn mentioned_types(krate: &Crate, file: usize, tokens: &[&Token]) -> BTreeSet<(usize, String)> {
    let mut types = BTreeSet::new();
    for (at, token) in tokens.iter().enumerate() {
        let follows = |sign: &str| at > 0 && tokens[at - 1].is(sign);
        if !token.is_word() || follows("::") || follows(".") {
            continue;
        }
        let mut path = vec![token.text.clone()];
        let mut next = at + 1;
        while next + 1 < tokens.len() && tokens[next].is("::") && tokens[next + 1].is_word() {
            path.push(tokens[next + 1].text.clone());
            next += 2;
        }
        let modules = krate
            .modules
            .iter()
            .filter(|(_, module)| module.file == file);
        types.extend(
            modules.filter_map(|(module, _)| match krate.resolve(module, &path) {
                Some(Target::Item { file, name }) => {
                    is_type(krate, file, &name).then_some((file, name))
                }
                _ => None,
            }),
        );
    }
    types
}

fn is_type(krate: &Crate, file: usize, name: &str) -> bool {
    let modules = krate.modules.values().filter(|module| module.file == file);
    let mut items = modules.flat_map(|module| &module.items);
    items.any(|item| item.name == name && item.is_type)
}

fn declared_types(krate: &Crate) -> usize {
    let items = krate.modules.values().flat_map(|module| &module.items);
    items.filter(|item| item.is_type).count()
}

fn source_files(krate: &Crate) -> usize {
    let files: BTreeSet<usize> = krate.modules.values().map(|module| module.file).collect();
    files.len()
}
