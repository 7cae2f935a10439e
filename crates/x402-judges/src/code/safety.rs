//! What can be seen to be unsafe in the text of a program.

use std::collections::HashSet;

use starlark::{
    analysis::AstModuleLint as _,
    codemap::Span,
    environment::Globals,
    syntax::{
        AstModule,
        ast::{ArgumentP, AssignOp, AssignTargetP, AstAssignTarget, AstExpr, AstLiteral, AstStmt, BinOp, ExprP, StmtP},
    },
};
use starlark_syntax::{lexer::TokenInt, syntax::uniplate::Visit};
use x402_market::Severity;

use super::job::Fault;

/// Parts of names of what nobody else may learn.
const SECRETS: &str = "secret secrets token tokens password passwd pin mac hmac signature";
/// How many turns a loop may have at most, if its program says so.
const TURNS: i32 = 10_000_000;

/// Returns the faults of a program: of the linter of Starlark, of comparisons of secrets that end early, and of what grows without bound.
pub(super) fn check(ast: &AstModule, globals: &Globals) -> Vec<Fault> {
    let names: HashSet<String> = globals.names().map(|name| name.as_str().to_owned()).collect();
    let lints = ast.lint(Some(&names)).into_iter().filter_map(|lint| {
        let severity = match &*lint.short_name {
            "using-undefined" => Severity::Critical,
            "using-unassigned"
            | "using-maybe-undefined"
            | "missing-return"
            | "missing-return-expression"
            | "unreachable" => Severity::Major,
            "duplicate-key" | "no-effect" | "ident-as-statement" | "inefficient-bool-check" => Severity::Minor,
            _ => return None,
        };
        Some(Fault { severity, line: Some(lint.location.resolve_span().begin.line), what: lint.problem })
    });
    let mut review = Review {
        ast,
        faults: lints.collect(),
        secrets: HashSet::new(),
        derived: HashSet::new(),
        sequences: HashSet::new(),
    };
    review.statement(ast.statement(), false);
    review.faults
}

/// What is known of the function that is looked at.
struct Review<'a> {
    ast: &'a AstModule,
    faults: Vec<Fault>,
    /// Parameters with the name of a secret.
    secrets: HashSet<&'a str>,
    /// These, and what was computed from them.
    derived: HashSet<&'a str>,
    /// Variables that began as a text or a list.
    sequences: HashSet<&'a str>,
}

impl<'a> Review<'a> {
    fn fault(&mut self, severity: Severity, span: Span, what: impl Into<String>) {
        let line = Some(self.ast.file_span(span).resolve_span().begin.line);
        self.faults.push(Fault { severity, line, what: what.into() });
    }

    fn statement(&mut self, statement: &'a AstStmt, in_loop: bool) {
        match &statement.node {
            StmtP::Def(function) => {
                let parameters = function.params.iter().filter_map(|parameter| parameter.node.ident());
                self.secrets = parameters.map(|name| &*name.ident).filter(|name| is_secret(name)).collect();
                (self.derived, self.sequences) = (self.secrets.clone(), HashSet::new());
            }
            StmtP::For(turns) if self.uses(&turns.over) => self.derive(&turns.var),
            StmtP::Assign(assign) => {
                if self.uses(&assign.rhs) {
                    self.derive(&assign.lhs);
                }
                if let AssignTargetP::Identifier(name) = &assign.lhs.node {
                    if let ExprP::Literal(AstLiteral::String(_)) | ExprP::List(_) | ExprP::ListComprehension(..) =
                        assign.rhs.node
                    {
                        self.sequences.insert(&name.ident);
                    }
                    if in_loop && self.is_multiple(&name.ident, &assign.rhs) {
                        self.grows(statement.span, &name.ident);
                    }
                }
            }
            StmtP::AssignModify(target, operation, value) => {
                if let AssignTargetP::Identifier(name) = &target.node
                    && in_loop
                    && (*operation == AssignOp::Add && is_name(value, &name.ident)
                        || *operation == AssignOp::Multiply && self.sequences.contains(&*name.ident))
                {
                    self.grows(statement.span, &name.ident);
                }
            }
            StmtP::If(condition, _) | StmtP::IfElse(condition, _)
                if in_loop && self.uses(condition) && ends_early(statement) =>
            {
                self.leaks(condition.span);
            }
            _ => {}
        }
        let in_loop = match statement.node {
            StmtP::For(_) => true,
            StmtP::Def(_) => false,
            _ => in_loop,
        };
        statement.visit_children(|child| match child {
            Visit::Stmt(child) => self.statement(child, in_loop),
            Visit::Expr(child) => self.expression(child, in_loop),
        });
    }

    fn expression(&mut self, expression: &'a AstExpr, in_loop: bool) {
        match &expression.node {
            ExprP::Op(one, BinOp::Equal | BinOp::NotEqual, other)
                if [one, other].iter().any(|side| self.secrets.iter().any(|secret| is_name(side, secret)))
                    && ![one, other].iter().any(|side| matches!(side.node, ExprP::Literal(_))) =>
            {
                self.leaks(expression.span);
            }
            ExprP::Op(one, BinOp::In | BinOp::NotIn, other)
                if matches!(&other.node, ExprP::Identifier(name) if self.derived.contains(&*name.node.ident))
                    && !matches!(one.node, ExprP::Literal(_)) =>
            {
                self.leaks(expression.span);
            }
            ExprP::Call(function, arguments) => match (&function.node, &*arguments.args) {
                (ExprP::Dot(list, method), [argument]) if in_loop && method.node == "extend" => {
                    if let ExprP::Identifier(name) = &list.node
                        && is_name(argument.node.expr(), &name.node.ident)
                    {
                        self.grows(expression.span, &name.node.ident);
                    }
                }
                (_, arguments) if is_name(function, "range") => {
                    let large = |argument: &&ArgumentP<_>| match &argument.expr().node {
                        ExprP::Literal(AstLiteral::Int(turns)) => !matches!(turns.node, TokenInt::I32(..=TURNS)),
                        _ => false,
                    };
                    if arguments.iter().map(|argument| &argument.node).find(large).is_some() {
                        self.fault(Severity::Major, expression.span, "a loop of more than ten million turns");
                    }
                }
                _ => {}
            },
            _ => {}
        }
        expression.visit_expr(|child| self.expression(child, in_loop));
    }

    /// Returns `true` if a value depends on a secret, other than on its length.
    fn uses(&self, expression: &AstExpr) -> bool {
        match &expression.node {
            ExprP::Identifier(name) => self.derived.contains(&*name.node.ident),
            ExprP::Call(function, _) if is_name(function, "len") => false,
            node => {
                let mut found = false;
                node.visit_expr(|child| found |= self.uses(child));
                found
            }
        }
    }

    /// Returns `true` for `x + x`, and for `x * n` if `x` is a text or a list.
    fn is_multiple(&self, name: &str, expression: &AstExpr) -> bool {
        match &expression.node {
            ExprP::Op(one, BinOp::Add, other) => is_name(one, name) && is_name(other, name),
            ExprP::Op(one, BinOp::Multiply, other) => {
                self.sequences.contains(name) && (is_name(one, name) || is_name(other, name))
            }
            _ => false,
        }
    }

    fn derive(&mut self, target: &'a AstAssignTarget) {
        target.visit_lvalue(|name| _ = self.derived.insert(&name.ident));
    }

    fn grows(&mut self, span: Span, name: &str) {
        self.fault(Severity::Major, span, format!("`{name}` grows by a multiple of itself in each turn of the loop"));
    }

    fn leaks(&mut self, span: Span) {
        let what =
            "the time of this comparison tells how much of the secret was guessed: compare all of it, whatever differs";
        self.fault(Severity::Critical, span, what);
    }
}

fn is_secret(name: &str) -> bool {
    name.split('_').any(|part| crate::is_listed(part, SECRETS))
}

fn is_name(expression: &AstExpr, wanted: &str) -> bool {
    matches!(&expression.node, ExprP::Identifier(name) if name.node.ident == wanted)
}

/// Returns `true` if a statement can end the loop around it.
fn ends_early(statement: &AstStmt) -> bool {
    match &statement.node {
        StmtP::Return(_) | StmtP::Break => true,
        StmtP::For(_) | StmtP::Def(_) => false,
        node => {
            let mut found = false;
            node.visit_stmt(|child| found |= ends_early(child));
            found
        }
    }
}
