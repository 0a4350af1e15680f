//! The modules of a crate: their items, their imports and the paths in their code, and what a path leads to.
//!
//! This reads text, without the types. It knows `crate`, `self` and `super`, nested groups, renames, globs and
//! re-exports through any number of modules. It does not expand macros: a path into a module that does not show
//! the item counts as one to the module's own file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use crate::text::File;
use crate::tokens::{self, Token};

pub(crate) type ModulePath = Vec<String>;

/// The modules that the crate root declares, at any depth, without those for tests.
pub(crate) struct Crate {
    pub(crate) files: Vec<PathBuf>,
    pub(crate) modules: BTreeMap<ModulePath, Module>,
}

/// A file, or `mod name { .. }` in one.
#[derive(Default)]
pub(crate) struct Module {
    /// An index into [`Crate::files`].
    pub(crate) file: usize,
    pub(crate) items: Vec<Item>,
    pub(crate) imports: Vec<Import>,
    /// Paths of two or more words in code, as they are written.
    pub(crate) paths: Vec<(usize, Vec<String>)>,
    /// Every word in code, outside of imports.
    pub(crate) words: BTreeSet<String>,
    pub(crate) methods: Vec<Methods>,
    /// The functions that are called on `self`, with their lines.
    pub(crate) self_calls: Vec<(usize, String)>,
    children: BTreeSet<String>,
}

pub(crate) struct Item {
    pub(crate) kind: String,
    pub(crate) name: String,
    pub(crate) line: usize,
    /// Whether an attribute `cfg` decides about it, or about a module around it in this file.
    pub(crate) is_conditional: bool,
}

pub(crate) struct Import {
    pub(crate) line: usize,
    pub(crate) path: Vec<String>,
    /// The name it binds; `*` for a glob.
    pub(crate) name: String,
    pub(crate) is_reexport: bool,
}

/// One `impl Type { .. }` without a trait.
pub(crate) struct Methods {
    pub(crate) of: Vec<String>,
    pub(crate) names: BTreeSet<String>,
}

/// What a path leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    Item {
        file: usize,
        name: String,
    },
    Module(ModulePath),
    /// The path ends in this module, which does not show the next name.
    Hidden(ModulePath),
}

impl Crate {
    /// Follows the `mod` declarations from `lib.rs`.
    pub(crate) fn new(files: &[File]) -> Self {
        let mut this = Self {
            files: files.iter().map(|file| file.path.clone()).collect(),
            modules: BTreeMap::new(),
        };
        let mut open = vec![ModulePath::new()];
        while let Some(path) = open.pop() {
            let Some(file) = this.file_of(&path) else {
                continue;
            };
            let tokens = tokens::tokens(&files[file].text);
            open.extend(this.read_module(file, &tokens, path, false));
        }
        this
    }

    fn file_of(&self, module: &[String]) -> Option<usize> {
        let folder: PathBuf = module.iter().collect();
        let candidates = if module.is_empty() {
            [PathBuf::from("lib.rs"), PathBuf::from("main.rs")]
        } else {
            [folder.with_extension("rs"), folder.join("mod.rs")]
        };
        self.files.iter().position(|file| candidates.contains(file))
    }

    /// Reads a module and those inside it; returns the modules that have files of their own.
    fn read_module(
        &mut self,
        file: usize,
        tokens: &[Token],
        path: ModulePath,
        is_gated: bool,
    ) -> Vec<ModulePath> {
        let mut module = Module {
            file,
            ..Module::default()
        };
        let mut elsewhere = Vec::new();
        let (mut at, mut is_public, mut is_conditional) = (0, false, is_gated);
        while at < tokens.len() {
            match tokens[at].text.as_str() {
                "#" => {
                    let end = tokens::end_of_attribute(tokens, at);
                    is_conditional |= tokens[at..end].iter().any(|token| token.is("cfg"));
                    module.read_code(&tokens[at..end]);
                    at = end;
                    continue;
                }
                "pub" => {
                    is_public = true;
                    at += 1;
                    if tokens.get(at).is_some_and(|token| token.is("(")) {
                        let close = tokens[at..].iter().position(|token| token.is(")"));
                        let end = at + close.map_or(1, |close| close + 1);
                        module.read_code(&tokens[at..end]);
                        at = end;
                    }
                    continue;
                }
                // The item's kind follows.
                "unsafe" | "async" | "extern" => {
                    at += 1;
                    continue;
                }
                "const" if tokens[at + 1..].first().is_some_and(is_function_word) => {
                    at += 1;
                    continue;
                }
                _ => {}
            }
            let end = tokens::end_of_item(tokens, at);
            let item = &tokens[at..end];
            match item[0].text.as_str() {
                "use" => module.read_import(item, is_public),
                "mod" => {
                    let name = item[1].text.clone();
                    let child = [path.as_slice(), std::slice::from_ref(&name)].concat();
                    module.children.insert(name);
                    if item[2].is("{") {
                        elsewhere.extend(self.read_module(
                            file,
                            &item[3..item.len() - 1],
                            child,
                            is_conditional,
                        ));
                    } else {
                        elsewhere.push(child);
                    }
                }
                kind => {
                    let name = match kind {
                        "struct" | "enum" | "union" | "trait" | "type" | "static" | "const"
                        | "fn" => item.get(1),
                        "macro_rules" => item.get(2),
                        _ => None,
                    };
                    module.items.extend(name.map(|name| Item {
                        kind: kind.to_owned(),
                        name: name.text.clone(),
                        line: name.line,
                        is_conditional,
                    }));
                    if kind == "impl" {
                        module.methods.extend(methods(item));
                    }
                    module.read_code(item);
                }
            }
            at = end;
            (is_public, is_conditional) = (false, is_gated);
        }
        self.modules.insert(path, module);
        elsewhere
    }

    /// What a path in the code of `module` leads to; nothing if that is another crate or a local name.
    pub(crate) fn resolve(&self, module: &[String], path: &[String]) -> Option<Target> {
        self.follow(module, path, &mut Vec::new())
    }

    fn follow(&self, from: &[String], path: &[String], seen: &mut Seen) -> Option<Target> {
        let mut rest = path.iter();
        let mut at = match rest.clone().next()?.as_str() {
            "crate" => {
                rest.next();
                Target::Module(ModulePath::new())
            }
            "self" => {
                rest.next();
                Target::Module(from.to_vec())
            }
            "super" => Target::Module(from.to_vec()),
            first => {
                rest.next();
                let is_last = path.len() == 1;
                self.look_up(from, first, is_last, seen)?
            }
        };
        while let Some(name) = rest.next() {
            let Target::Module(module) = &at else {
                // An associated item, or a variant.
                break;
            };
            at = if name == "super" {
                let (_, parent) = module.split_last()?;
                Target::Module(parent.to_vec())
            } else {
                let is_last = rest.len() == 0;
                self.look_up(module, name, is_last, seen)
                    .unwrap_or_else(|| Target::Hidden(module.clone()))
            };
        }
        Some(at)
    }

    /// What a name means in a module. The last name of a path is rather an item than a module.
    fn look_up(
        &self,
        path: &[String],
        name: &str,
        is_last: bool,
        seen: &mut Seen,
    ) -> Option<Target> {
        let asked = (path.to_vec(), name.to_owned(), is_last);
        if seen.contains(&asked) {
            return None;
        }
        seen.push(asked);
        let found = self.look_into(path, name, is_last, seen);
        seen.pop();
        found
    }

    fn look_into(
        &self,
        path: &[String],
        name: &str,
        is_last: bool,
        seen: &mut Seen,
    ) -> Option<Target> {
        let module = self.modules.get(path)?;
        let child = module
            .children
            .contains(name)
            .then(|| Target::Module([path, &[name.to_owned()]].concat()));
        if child.is_some() && !is_last {
            return child;
        }
        let item = module.items.iter().find(|item| item.name == name);
        if let Some(item) = item {
            let (file, name) = (module.file, item.name.clone());
            return Some(Target::Item { file, name });
        }
        let bound = module
            .imports
            .iter()
            .filter(|import| import.name == name)
            .find_map(|import| self.follow(path, &import.path, seen))
            .filter(|target| !matches!(target, Target::Hidden(_)));
        if bound.is_some() || child.is_some() {
            return bound.or(child);
        }
        let globs = module.imports.iter().filter(|import| import.name == "*");
        for glob in globs {
            if let Some(Target::Module(inner)) = self.follow(path, &glob.path, seen)
                && let Some(found) = self.look_up(&inner, name, is_last, seen)
            {
                return Some(found);
            }
        }
        None
    }
}

/// The questions that are being answered, so that re-exports in a circle end.
type Seen = Vec<(ModulePath, String, bool)>;

impl Module {
    /// Reads a `use` from its first token to its `;`.
    fn read_import(&mut self, tokens: &[Token], is_reexport: bool) {
        let line = tokens[0].line;
        let mut prefixes: Vec<Vec<String>> = Vec::new();
        let mut path: Vec<String> = Vec::new();
        let mut rename = None;
        let mut is_rename = false;
        for token in &tokens[1..] {
            match token.text.as_str() {
                "::" => {}
                "as" => is_rename = true,
                "{" => {
                    prefixes.push(path.clone());
                }
                "," | "}" | ";" => {
                    let prefix = prefixes.last().cloned().unwrap_or_default();
                    if path.len() > prefix.len() {
                        self.push_import(line, path, rename.take(), is_reexport);
                    }
                    path = prefix;
                    if token.is("}") {
                        // What stands in front of the group has been imported with it.
                        prefixes.pop();
                        path = prefixes.last().cloned().unwrap_or_default();
                    }
                }
                word if is_rename => {
                    rename = Some(word.to_owned());
                    is_rename = false;
                }
                word => path.push(word.to_owned()),
            }
        }
    }

    fn push_import(
        &mut self,
        line: usize,
        mut path: Vec<String>,
        rename: Option<String>,
        is_reexport: bool,
    ) {
        // `a::{self}` is `a`.
        if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
            path.pop();
        }
        let mut name = rename.unwrap_or_else(|| path.last().cloned().unwrap_or_default());
        if name == "*" {
            path.pop();
            name = "*".to_owned();
        }
        self.imports.push(Import {
            line,
            path,
            name,
            is_reexport,
        });
    }

    /// Reads the words and paths of an item, and the imports inside of functions.
    fn read_code(&mut self, tokens: &[Token]) {
        let mut at = 0;
        while at < tokens.len() {
            let token = &tokens[at];
            let next = |ahead: usize| tokens.get(at + ahead);
            if token.is("use") && next(1).is_some_and(|next| next.is_word() || next.is("::")) {
                let end = tokens::end_of_item(tokens, at);
                self.read_import(&tokens[at..end], false);
                at = end;
                continue;
            }
            if !token.is_word() {
                at += 1;
                continue;
            }
            if token.is("self") || token.is("Self") {
                let is_call = next(1).is_some_and(|next| next.is(".") || next.is("::"))
                    && next(3).is_some_and(|next| next.is("("));
                if is_call {
                    self.self_calls
                        .push((token.line, tokens[at + 2].text.clone()));
                }
            }
            let mut path = vec![token.text.clone()];
            let mut end = at + 1;
            while tokens.get(end).is_some_and(|sign| sign.is("::"))
                && tokens.get(end + 1).is_some_and(Token::is_word)
            {
                path.push(tokens[end + 1].text.clone());
                end += 2;
            }
            // `.name::<T>()`, `<T as Trait>::name` and `::other_crate` begin no path of this crate.
            let is_inner = at > 0 && (tokens[at - 1].is(".") || tokens[at - 1].is("::"));
            self.words.extend(path.iter().cloned());
            if path.len() > 1 && (!is_inner || token.is("crate")) {
                self.paths.push((token.line, path));
            }
            at = end;
        }
    }
}

/// The functions of an `impl` without a trait.
fn methods(tokens: &[Token]) -> Option<Methods> {
    let mut at = 1;
    if tokens.get(1)?.is("<") {
        at = tokens::end_of_generics(tokens, 1);
    }
    let mut of = Vec::new();
    let body = loop {
        let token = tokens.get(at)?;
        match token.text.as_str() {
            "for" => return None,
            "{" => break at,
            "<" => at = tokens::end_of_generics(tokens, at),
            "where" => {
                let body = tokens[at..].iter().position(|token| token.is("{"))?;
                break at + body;
            }
            word => {
                if token.is_word() {
                    of.push(word.to_owned());
                }
                at += 1;
            }
        }
    };
    let functions = tokens[body..].windows(2).filter(|pair| pair[0].is("fn"));
    Some(Methods {
        of,
        names: functions.map(|pair| pair[1].text.clone()).collect(),
    })
}

fn is_function_word(token: &Token) -> bool {
    ["fn", "unsafe", "async", "extern"]
        .iter()
        .any(|word| token.is(word))
}
